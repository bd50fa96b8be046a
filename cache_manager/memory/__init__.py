"""Pool memory and how it is handed to runners."""
