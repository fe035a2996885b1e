{{- define "leasehold.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end -}}

{{- /* The name of a Service, a Deployment or a Job, which is also the value of labels. Arguments: root, of (what it is). */ -}}
{{- define "leasehold.named" -}}
{{- $name := printf "%s-%s" (include "leasehold.name" .root) .of -}}
{{- if gt (len $name) 63 }}{{ fail (printf "the name %s has more than 63 characters: choose a shorter name of the release or of the pool" $name) }}{{ end -}}
{{ $name }}
{{- end -}}

{{- /* What selects the pods of a component. Arguments: root, component, pool (workers only). */ -}}
{{- define "leasehold.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
leasehold/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "leasehold.labels" -}}
{{ include "leasehold.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "leasehold.image" -}}
{{- $image := .root.Values.image -}}
{{- $tag := $image.tag | default .root.Chart.AppVersion -}}
{{- with $image.registry }}{{ . }}/{{ end }}{{ index $image .name }}{{ ternary "@" ":" (hasPrefix "sha256:" $tag) }}{{ $tag }}
{{- end -}}

{{- /* Pool name -> its values over those of all pools, as JSON. */ -}}
{{- define "leasehold.pools" -}}
{{- $pools := dict -}}
{{- range $name, $own := .Values.workers.pools -}}
{{- $_ := set $pools $name (mergeOverwrite (deepCopy $.Values.workers.defaults) (deepCopy ($own | default dict))) -}}
{{- end -}}
{{- toJson $pools -}}
{{- end -}}

{{- /* `pools` of leasehold/settings.py: what GET /v1/scaling/{pool} knows of each. */ -}}
{{- define "leasehold.poolsSetting" -}}
{{- $declared := dict -}}
{{- range $name, $pool := include "leasehold.pools" . | fromJson -}}
{{- $scaling := $pool.autoscaling -}}
{{- $_ := set $declared $name (dict "queues" $pool.queues "labels" $pool.labels "target_wait_seconds" $scaling.targetWaitSeconds "least" (int $scaling.min) "most" (int $scaling.max)) -}}
{{- end -}}
{{- toJson $declared -}}
{{- end -}}

{{- define "leasehold.match" -}}
{{ dict "matchLabels" (include "leasehold.selector" . | fromYaml) | toJson }}
{{- end -}}
