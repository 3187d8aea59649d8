{{- /* The same objects as src/twofold/kubernetes/data/objects.yaml.jinja; a test compares them. */ -}}

{{- define "twofold.labels" -}}
app.kubernetes.io/name: twofold
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* The roles that have pods: a YAML mapping of role to workers. */ -}}
{{- define "twofold.roles" -}}
{{- $roles := dict -}}
{{- if ne .Values.engine "emulated" -}}
{{- range $role, $workers := .Values.workers -}}
{{- if $workers.replicas -}}{{- $_ := set $roles $role $workers -}}{{- end -}}
{{- end -}}
{{- end -}}
{{ toYaml $roles }}
{{- end }}

{{- define "twofold.check" -}}
{{- $roles := include "twofold.roles" . | fromYaml -}}
{{- if eq .Values.engine "emulated" -}}
{{- if not .Values.plan -}}{{- fail "engine emulated needs plan, with the machines to emulate" -}}{{- end -}}
{{- else if not $roles -}}
{{- fail "workers: all replicas are 0" -}}
{{- else if and (hasKey $roles "mixed") (gt (len $roles) 1) (not (has (.Values.serve.router | default "jsq") (list "splitwise" "jsq-planned"))) -}}
{{- fail (printf "workers.mixed beside others is for serve.router jsq-planned or splitwise, not %s" (.Values.serve.router | default "jsq")) -}}
{{- end -}}
{{- end }}

{{- define "twofold.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- define "twofold.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "twofold.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
periodSeconds: 10
timeoutSeconds: 5
failureThreshold: {{ .failures }}
{{- end }}

{{- define "twofold.serveArgs" -}}
- serve
{{- if eq .Values.engine "emulated" }}
- --engine=emulated
- --cluster=/etc/twofold/plan/plan.yaml
{{- else }}
- {{ .Values.model.path }}
{{- $roles := include "twofold.roles" . | fromYaml }}
{{- if and (hasKey $roles "mixed") (eq (len $roles) 1) }}
- --colocated=0
{{- else }}
- --prefill=0
- --decode=0
{{- end }}
- --listen-workers=tcp://$(POD_IP):{{ .Values.gateway.busPort }}
- --cluster-key=/run/twofold/cluster.key
{{- end }}
- --host=0.0.0.0
- --port={{ .Values.gateway.port }}
- --log-format=json
{{- with .Values.model.servedName }}
- --served-model-name={{ . }}
{{- end }}
{{- if .Values.allowAnonymous }}
- --allow-anonymous
{{- else }}
- --api-keys=/etc/twofold/api-keys/keys
{{- end }}
{{- range $key, $value := omit .Values.serve "extraArgs" }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ kebabcase $key }}
{{- else if kindIs "string" $value }}
- --{{ kebabcase $key }}={{ $value }}
{{- else if not (kindIs "invalid" $value) }}
- --{{ kebabcase $key }}={{ toJson $value }}
{{- end }}
{{- end }}
{{- with .Values.serve.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Of (dict "root" $ "role" ROLE "workers" WORKERS). */ -}}
{{- define "twofold.joinArgs" -}}
- join
- tcp://{{ .root.Release.Name }}-bus:{{ .root.Values.gateway.busPort }}
- --cluster-key=/run/twofold/cluster.key
- --model={{ .root.Values.model.path }}
- --{{ ternary "colocated" .role (eq .role "mixed") }}={{ .workers.workersPerPod }}
- --name=$(POD_NAME)
- --address=$(POD_IP)
- --device={{ .workers.device }}
- --kv-cache-memory-bytes={{ .workers.kvCacheMemory }}
{{- with .workers.kvStore.memory }}
- --kv-store-dram={{ . }}
{{- end }}
{{- with .workers.kvStore.disk }}
- --kv-store-disk=/var/lib/twofold/kv:{{ . }}
{{- end }}
- --log-format=json
{{- with .workers.extraArgs }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* A pod template of (dict "root" $ "component" NAME "pod" VALUES "container" YAML "mounts" YAML "volumes" YAML "annotations" DICT). */ -}}
{{- define "twofold.pod" -}}
{{- $values := .root.Values -}}
{{- $joins := ne $values.engine "emulated" -}}
{{- $user := int $values.securityContext.runAsUser -}}
metadata:
  labels:
    {{- include "twofold.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  {{- with .annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: 30
  securityContext:
    runAsNonRoot: true
    runAsUser: {{ $user }}
    runAsGroup: {{ $user }}
    fsGroup: {{ $user }}
    seccompProfile:
      type: RuntimeDefault
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .pod.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .pod.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $joins }}
  initContainers:
    # Kubernetes opens a mounted Secret to the group of the pod, and Twofold takes no key that others may read.
    - name: cluster-key
      {{- include "twofold.image" .root | nindent 6 }}
      command: [install, -m, "0400", /etc/twofold/cluster-key/cluster.key, /run/twofold/cluster.key]
      resources:
        requests:
          cpu: 10m
          memory: 16Mi
        limits:
          memory: 64Mi
      securityContext:
        {{- include "twofold.confined" . | nindent 8 }}
      volumeMounts:
        - name: cluster-key
          mountPath: /etc/twofold/cluster-key
          readOnly: true
        - name: key
          mountPath: /run/twofold
  {{- end }}
  containers:
    - name: twofold
      {{- include "twofold.image" .root | nindent 6 }}
      command: [twofold]
      {{- .container | nindent 6 }}
      env:
        - name: POD_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        - name: HOME
          value: /tmp
        {{- with .pod.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      resources:
        {{- toYaml .pod.resources | nindent 8 }}
      securityContext:
        {{- include "twofold.confined" . | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- with .mounts }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- if $joins }}
        - name: key
          mountPath: /run/twofold
          readOnly: true
        {{- end }}
        {{- if $values.model.volume }}
        - name: model
          mountPath: {{ $values.model.mountPath }}
          readOnly: true
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- with .volumes }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if $joins }}
    - name: key
      emptyDir:
        medium: Memory
        sizeLimit: 1Mi
    - name: cluster-key
      secret:
        secretName: {{ $values.clusterKey.existingSecret | default (printf "%s-cluster-key" .root.Release.Name) }}
    {{- end }}
    {{- with $values.model.volume }}
    - name: model
      {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}

{{- /* A PodDisruptionBudget of (dict "root" $ "component" NAME "most" COUNT). */ -}}
{{- define "twofold.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .root.Release.Name }}-{{ .component }}
  labels:
    {{- include "twofold.labels" .root | nindent 4 }}
spec:
  maxUnavailable: {{ .most }}
  selector:
    matchLabels:
      {{- include "twofold.labels" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
{{- end }}
