"""Draftline: trains DFlash drafters and proves that what is trained is what will be served."""
