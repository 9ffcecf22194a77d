"""Language models of Hugging Face's transformers, built from their config alone and split by structure. No code but the library's runs."""
