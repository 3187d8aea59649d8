"""Fault suite for services with an OpenAI API: answers under faults, compared with reference answers."""
