"""Scheduling and execution: scheduler, engine, worker, model runner, graph runner."""
