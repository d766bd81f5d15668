"""What a call is: pure data, without torch or triton."""
