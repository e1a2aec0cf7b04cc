"""The threads that run batches, their answers, and whom they tell at the end. Any gateway resumes another's."""
