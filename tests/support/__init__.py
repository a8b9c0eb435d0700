"""Generated models and independent references for the tests."""
