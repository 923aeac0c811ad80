"""`pushpull compare`: one script under several settings, and the report."""
