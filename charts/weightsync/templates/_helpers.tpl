{{- define "weightsync.labels" -}}
app.kubernetes.io/name: weightsync-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "weightsync.selector" -}}
app.kubernetes.io/name: weightsync-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* One name for all: agents know the operator by its service account, so it is no value. */}}
{{- define "weightsync.name" -}}
weightsync-operator
{{- end }}

{{/* Objects of the cluster carry the namespace, so that two installations do not share them. */}}
{{- define "weightsync.clusterName" -}}
weightsync-operator.{{ .Release.Namespace }}
{{- end }}
