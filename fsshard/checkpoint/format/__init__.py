"""How does a checkpoint lie on the disk? Its directory, its index, and its files of tensors."""
