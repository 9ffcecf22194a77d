"""What the run is (manifest), what this volunteer allows (settings) and where their files live (paths)."""
