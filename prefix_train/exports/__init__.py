"""What a run gives away, beyond `prefix_train.export`: whole models, streamed, and the check of what was written."""
