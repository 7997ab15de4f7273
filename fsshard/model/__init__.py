"""What is done to the module, whatever the engine? Checks, precision, recomputation, compilation, initialisation."""
