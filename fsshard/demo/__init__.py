"""What does a whole training look like? A TFNO on Darcy flow, solved here: ``fsshard demo``, from any folder."""
