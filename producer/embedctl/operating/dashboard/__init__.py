"""`embedctl flower`: Celery's dashboard on our broker, with an access rule, a history and no secret on its pages."""
