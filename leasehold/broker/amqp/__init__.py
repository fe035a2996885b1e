"""The broker RabbitMQ: connection, topology, publishing with confirms, consuming.
Only `leasehold.broker` imports this folder.
"""
