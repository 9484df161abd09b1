"""Pure decisions of the operator: values in, values out. No I/O, no kopf, no Kubernetes client, no clock."""
