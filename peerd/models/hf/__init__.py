"""Language models of Hugging Face's transformers, by their config alone: split structurally, never by their own code."""
