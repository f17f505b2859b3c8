"""Files of models, in and out; a stranger's byte is checked here."""
