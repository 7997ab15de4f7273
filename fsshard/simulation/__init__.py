"""What will it cost? The real engine on fake tensors: memory and bytes sent, before the launch."""
