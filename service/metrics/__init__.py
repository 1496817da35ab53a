"""Every metric of the service, with its labels and buckets."""
