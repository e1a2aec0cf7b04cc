"""What each role does where only that role is installed."""
