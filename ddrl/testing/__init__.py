"""What users can test with. Imports torch only inside its modules; nothing else of ddrl imports it."""
