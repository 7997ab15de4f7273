"""A folder for PYTHONPATH: ``fsshard trace`` reaches each Python process of a command through its ``sitecustomize``."""
