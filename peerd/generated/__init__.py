"""Generated from protos/ by scripts/protos; do not edit."""
