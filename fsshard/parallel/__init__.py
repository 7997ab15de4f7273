"""Which rank does what on a mesh of more than one dimension?"""
