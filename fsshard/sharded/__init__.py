"""What does the user hold? The wrapped model, its parameters, state dicts and norms, its optimizer and scaler."""
