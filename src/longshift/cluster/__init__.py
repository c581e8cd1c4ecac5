"""What is known of machines: constants and measured curves, each with its source."""
