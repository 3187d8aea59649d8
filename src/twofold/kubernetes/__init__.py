"""Deployment on Kubernetes: convert plans to Helm values, and values to Kubernetes objects."""
