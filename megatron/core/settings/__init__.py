"""Settings: dataclasses that become flags, and schedules written as text."""
