"""Use a trained model: text, validation loss, HellaSwag scores."""
