"""Use a trained model: its text, its validation loss, its HellaSwag scores."""
