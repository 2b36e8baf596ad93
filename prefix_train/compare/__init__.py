"""The streaming engine beside other programs that fine-tune large models on small GPUs: one host, one budget."""
