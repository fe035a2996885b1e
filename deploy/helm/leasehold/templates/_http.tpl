{{- /* What the API and the console are made of: they differ in command, settings and values. Arguments: root, component, command, settings. */ -}}
{{- define "leasehold.http" -}}
{{- $values := index .root.Values .component -}}
{{- $name := include "leasehold.named" (dict "root" .root "of" .component) -}}
{{- $scaled := ne (dig "autoscaling" "by" "none" $values) "none" -}}
{{- with $values.autoscaling }}{{ include "leasehold.checkBounds" (dict "of" $.component "scaling" .) }}{{ end -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels: {{- include "leasehold.labels" . | nindent 4 }}
spec:
  {{- if not $scaled }}
  replicas: {{ $values.replicas }}
  {{- end }}
  strategy: {rollingUpdate: {maxSurge: 25%, maxUnavailable: 0}}
  selector: {{ include "leasehold.match" . }}
  template:
    {{- $settings := mergeOverwrite (dict "api_host" "::" "metrics_host" "::" "metrics_port" 9100 "log_format" "json") (deepCopy .root.Values.settings) .settings (deepCopy $values.settings) }}
    {{- $pod := dict "image" "api" "settings" $settings "secrets" .root.Values.secrets "resources" $values.resources "tmp" "1Gi" "grace" 35 "pod" $values.pod "rest" (include "leasehold.httpProbes" .) }}
    {{- include "leasehold.pod" (merge $pod .) | nindent 4 }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels: {{- include "leasehold.labels" . | nindent 4 }}
spec:
  selector: {{- include "leasehold.selector" . | nindent 4 }}
  ports: [{name: http, port: 80, targetPort: http}]
---
{{ include "leasehold.budget" (merge (dict "name" $name) .) }}
{{- if $scaled }}
---
{{ include "leasehold.cpuScaler" (merge (dict "name" $name "scaling" $values.autoscaling) .) }}
{{- end }}
{{- with $values.ingress }}
{{- if .enabled }}
---
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: {{ $name }}
  labels: {{- include "leasehold.labels" $ | nindent 4 }}
  {{- with .annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .className }}
  ingressClassName: {{ . }}
  {{- end }}
  {{- with .tlsSecret }}
  tls: [{hosts: [{{ $values.ingress.host }}], secretName: {{ . }}}]
  {{- end }}
  rules:
    - host: {{ .host }}
      http:
        paths: [{path: /, pathType: Prefix, backend: {service: {name: {{ $name }}, port: {name: http}}}}]
{{- end }}
{{- end }}
{{- end -}}

{{- /* The sleep gives proxies time to learn that the pod ends: it still answers meanwhile. */ -}}
{{- define "leasehold.httpProbes" -}}
ports:
  - {name: http, containerPort: 8000}
  - {name: metrics, containerPort: 9100}
startupProbe: {httpGet: {path: /livez, port: http}, periodSeconds: 2, failureThreshold: 60}
livenessProbe: {httpGet: {path: /livez, port: http}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
readinessProbe: {httpGet: {path: /readyz, port: http}, periodSeconds: 5, timeoutSeconds: 5, failureThreshold: 2}
lifecycle: {preStop: {exec: {command: [sleep, "5"]}}}
{{- end -}}

{{- define "leasehold.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{- include "leasehold.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ ternary "25%" 1 (eq .component "worker") }}
  unhealthyPodEvictionPolicy: AlwaysAllow # while the database is away no API is ready: nodes can be drained nevertheless
  selector: {{ include "leasehold.match" . }}
{{- end -}}

{{- /* KEDA and the HorizontalPodAutoscaler refuse such bounds, but only once the migration has run. Arguments: of, scaling. */ -}}
{{- define "leasehold.checkBounds" -}}
{{- if and (ne .scaling.by "none") (gt (int .scaling.min) (int .scaling.max)) }}{{ fail (printf "%s: autoscaling.min is above autoscaling.max" .of) }}{{ end -}}
{{- end -}}

{{- define "leasehold.cpuScaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}
  labels: {{- include "leasehold.labels" . | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ .name }}}
  minReplicas: {{ .scaling.min }}
  maxReplicas: {{ .scaling.max }}
  metrics:
    - {type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: {{ .scaling.cpu }}}}}
  {{- with .scaling.calmSeconds }}
  behavior: {scaleDown: {stabilizationWindowSeconds: {{ . }}}}
  {{- end }}
{{- end -}}
