"""What a run consists of: rollouts, channels, hundreds of ranks."""
