{{- /*
A variable for each setting. Numbers are written as they are meant: Helm holds 1048576 as 1.048576e+06. Every pod has the
variable of the app, also those that have its name as an argument: whoever runs another command in a pod, such as
`leasehold doctor`, means the same app.
*/ -}}
{{- define "leasehold.env" -}}
{{- $settings := .settings }}
{{- with .root.Values.app }}{{ $settings = merge (dict "pipelines" .) $settings }}{{ end }}
{{- range $name, $value := $settings }}
{{- if not (kindIs "invalid" $value) }}
- name: LEASEHOLD_{{ upper $name }}
  {{- if or (kindIs "map" $value) (kindIs "slice" $value) }}
  value: {{ toJson $value | quote }}
  {{- else if and (kindIs "float64" $value) (eq (floor $value) $value) }}
  value: {{ int64 $value | quote }}
  {{- else }}
  value: {{ $value | quote }}
  {{- end }}
{{- end }}
{{- end }}
{{- range $name, $at := .secrets }}
{{- if $at }}
- name: LEASEHOLD_{{ upper $name }}_FILE
  value: /run/leasehold/{{ $name }}
{{- end }}
{{- end }}
{{- end -}}

{{- /*
The pod of a component: nothing is written but to /tmp, nobody is root, no capability, no token of Kubernetes.
Arguments: root, component, pool, image, command, settings, secrets, resources, tmp, grace, pod, rest (of the container, YAML).
*/ -}}
{{- define "leasehold.pod" -}}
metadata:
  labels: {{- include "leasehold.labels" . | nindent 4 }}
  {{- with .pod.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  serviceAccountName: {{ .root.Values.serviceAccountName }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .grace }}
  {{- if .never }}
  restartPolicy: Never
  {{- else }}
  topologySpreadConstraints:
    {{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
    - topologyKey: {{ $key }}
      maxSkew: 1
      whenUnsatisfiable: ScheduleAnyway
      labelSelector: {{ include "leasehold.match" $ }}
      matchLabelKeys: [pod-template-hash]
    {{- end }}
  {{- end }}
  {{- with omit .pod "annotations" }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001 # may read the files of the Secrets
    seccompProfile: {{- toYaml .root.Values.seccompProfile | nindent 6 }}
  containers:
    - name: {{ .component }}
      image: {{ include "leasehold.image" (dict "root" .root "name" .image) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      args: {{ toJson .command }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      env:
        {{- include "leasehold.env" . | trim | nindent 8 }}
        {{- if and .root.Values.cells.own (not .never) }}
        - {name: LEASEHOLD_CELL, value: {{ .root.Values.cells.own | quote }}}
        - {name: LEASEHOLD_CELLS_FILE, value: /run/leasehold-cells/cells.json}
        {{- end }}
        {{- with .root.Values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources: {{- toYaml .resources | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        - {name: secrets, mountPath: /run/leasehold, readOnly: true}
        {{- if and .root.Values.cells.own (not .never) }}
        - {name: cells, mountPath: /run/leasehold-cells, readOnly: true}
        {{- end }}
      {{- with .rest }}
      {{- . | nindent 6 }}
      {{- end }}
  volumes:
    - name: tmp
      emptyDir: {sizeLimit: {{ .tmp }}}
    - name: secrets
      projected:
        defaultMode: 0440
        sources:
          {{- range $name, $at := .secrets }}
          {{- if $at }}
          - secret: {name: {{ $at.secret }}, items: [{key: {{ $at.key }}, path: {{ $name }}}]}
          {{- end }}
          {{- end }}
    {{- if and .root.Values.cells.own (not .never) }}
    - name: cells
      projected:
        sources: [{configMap: {name: {{ include "leasehold.name" .root }}-cells}}]
    {{- end }}
{{- end -}}
