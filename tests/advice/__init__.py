"""What errors tell users to write is written here, and is right."""
