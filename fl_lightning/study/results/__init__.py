"""What a study found: runs read from folders or MLflow, one number per metric."""
