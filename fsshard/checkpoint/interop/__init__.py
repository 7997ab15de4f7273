"""How are other programs' checkpoints read and written? torch's, FairScale's, Hugging Face's, neuraloperator's."""
