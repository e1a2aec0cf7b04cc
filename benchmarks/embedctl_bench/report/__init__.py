"""What a report consists of, and its two forms: Markdown for people, JSON for programs."""
