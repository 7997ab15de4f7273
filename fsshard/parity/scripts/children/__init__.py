"""How is each Python process of a command reached? By this folder on PYTHONPATH: Python runs its ``sitecustomize``."""
