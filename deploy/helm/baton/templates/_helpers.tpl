{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels of a component of the release: {root, component}. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/part-of: baton
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end -}}

{{/* name, namespace and labels of an object: {root, component, name}. */}}
{{- define "baton.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end -}}

{{/* What runs: a YAML map of component to {roles, replicas, resources, facade, rpc, state}. */}}
{{- define "baton.components" -}}
{{- if eq .Values.mode "all-in-one" }}
all-in-one: { facade: true, rpc: {{ .Values.rpc.expose }}, registry: true, store: true, replicas: {{ .Values.allInOne.replicas }}, values: allInOne }
{{- else }}
facade: { facade: true, calls: [router, kvstore], replicas: {{ .Values.facade.replicas }}, values: facade }
router: { rpc: true, calls: [kvstore, registry], service: baton.v1.Router, replicas: {{ .Values.router.replicas }}, values: router }
registry: { rpc: true, calls: [kvstore], registry: true, service: baton.v1.PoolRegistry, replicas: 1, values: registry }
kvstore: { rpc: true, store: true, service: baton.v1.KVCacheStore, replicas: {{ .Values.kvstore.replicas }}, values: kvstore }
{{- end }}
{{- end -}}

{{/* Refuses values that contradict each other; each sentence says what to set. */}}
{{- define "baton.check" -}}
{{- $v := .Values -}}
{{- if not (or $v.discovery.selector (hasKey $v.config "discovery") (hasKey $v.config "instances")) -}}
{{- fail "where are the engines? Set discovery.selector, config.instances or config.discovery; config.instances=[] if they register" -}}
{{- end -}}
{{- $known := or $v.rpc.tokens.secret (and $v.rpc.tls.secret $v.rpc.tls.mutual) $v.rpc.insecure -}}
{{- if and (or (eq $v.mode "split") $v.rpc.expose) (not $known) -}}
{{- fail "other pods reach the RPC ports, and they know no callers: set rpc.tokens.secret, or rpc.tls.secret with rpc.tls.mutual, or allow it with rpc.insecure=true" -}}
{{- end -}}
{{- if and $v.rpc.tls.mutual (not $v.rpc.tls.secret) -}}
{{- fail "rpc.tls.mutual needs rpc.tls.secret" -}}
{{- end -}}
{{- $replicas := ternary $v.allInOne.replicas $v.kvstore.replicas (eq $v.mode "all-in-one") | int -}}
{{- if and (gt $replicas 1) (ne $v.store.backend "valkey") -}}
{{- fail "several processes with a store need store.backend=valkey: each would have entries of its own" -}}
{{- end -}}
{{- if and (eq $v.store.backend "valkey") (not $v.valkey.enabled) (not $v.store.valkey.url) -}}
{{- fail "store.backend=valkey needs store.valkey.url, or valkey.enabled=true for a server of this release" -}}
{{- end -}}
{{- if and $v.valkey.enabled (ne $v.store.backend "valkey") -}}
{{- fail "valkey.enabled needs store.backend=valkey: nothing would use the server" -}}
{{- end -}}
{{- if and $v.valkey.enabled $v.store.valkey.url -}}
{{- fail "store.valkey.url names another server: leave it empty, or set valkey.enabled=false" -}}
{{- end -}}
{{- if and $v.persistence.enabled (eq $v.mode "all-in-one") (gt $replicas 1) -}}
{{- fail "persistence.enabled keeps the state of one process: set allInOne.replicas=1" -}}
{{- end -}}
{{- end -}}

{{/* baton.yaml of a component, from what the user wrote and the other values: {root, component, spec}. */}}
{{- define "baton.config" -}}
{{- $v := .root.Values -}}
{{- $config := deepCopy $v.config -}}
{{- if .spec.registry -}}
{{- with $v.discovery -}}
{{- if .selector -}}
{{- $slices := dict "selector" .selector "role_label" .roleLabel -}}
{{- if .namespace }}{{ $_ := set $slices "namespace" .namespace }}{{ end -}}
{{- if .port }}{{ $_ := set $slices "port" (toString .port) }}{{ end -}}
{{- $_ := set $config "discovery" (mergeOverwrite (deepCopy (default dict $config.discovery)) (dict "kubernetes" $slices)) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $_ := unset $config "discovery" -}}
{{- /* A facade has the keys and headers of engines from there. */ -}}
{{- if not .spec.facade }}{{ $_ := unset $config "instances" }}{{ end -}}
{{- end -}}
{{- if .spec.store -}}
{{- $store := dict "backend" $v.store.backend -}}
{{- if eq $v.store.backend "valkey" -}}
{{- $url := ternary (printf "valkey://%s-valkey:6379" (include "baton.fullname" .root)) $v.store.valkey.url $v.valkey.enabled -}}
{{- $valkey := dict "url" $url "prefix" $v.store.valkey.prefix -}}
{{- if $v.store.valkey.passwordSecret }}{{ $_ := set $valkey "password_file" "/etc/baton/valkey/password" }}{{ end -}}
{{- if $v.store.valkey.caSecret }}{{ $_ := set $valkey "ca" "/etc/baton/valkey-ca/ca.crt" }}{{ end -}}
{{- $_ := set $store "valkey" $valkey -}}
{{- end -}}
{{- $_ := set $config "store" (mergeOverwrite (deepCopy (default dict $config.store)) $store) -}}
{{- else -}}
{{- $_ := unset $config "store" -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Arguments of a component's container: {root, component, spec}. */}}
{{- define "baton.args" -}}
{{- $v := .root.Values -}}
{{- $name := include "baton.fullname" .root -}}
{{- $scheme := ternary "https" "http" (ne $v.rpc.tls.secret "") -}}
- serve
{{- if ne .component "all-in-one" }}
- --roles={{ .component }}
{{- end }}
- --config=/etc/baton/config/baton.yaml
{{- if .spec.facade }}
- --host={{ $v.listenHost }}
- --port=8000
{{- if $v.apiKeys.secret }}
- --api-keys-file=/etc/baton/api-keys/keys.txt
{{- end }}
{{- end }}
{{- if .spec.rpc }}
- --rpc-host={{ $v.listenHost }}
- --rpc-port=50051
{{- if $v.rpc.tokens.secret }}
- --rpc-tokens-file=/etc/baton/tokens/tokens.txt
{{- end }}
{{- if $v.rpc.tls.secret }}
- --rpc-tls-cert=/etc/baton/tls/tls.crt
- --rpc-tls-key=/etc/baton/tls/tls.key
{{- if $v.rpc.tls.mutual }}
- --rpc-tls-client-ca=/etc/baton/tls/ca.crt
{{- end }}
{{- end }}
{{- if $v.rpc.insecure }}
- --insecure-rpc
{{- end }}
{{- end }}
{{- range .spec.calls }}
- --{{ . }}-url={{ $scheme }}://{{ $name }}-{{ . }}:50051
{{- end }}
{{- if .spec.calls }}
{{- if $v.rpc.tokens.secret }}
- --rpc-client-token-file=/etc/baton/client-token/client-token
{{- end }}
{{- if $v.rpc.tls.secret }}
- --rpc-client-ca=/etc/baton/tls/ca.crt
{{- if $v.rpc.tls.mutual }}
- --rpc-client-cert=/etc/baton/tls/tls.crt
- --rpc-client-key=/etc/baton/tls/tls.key
{{- end }}
{{- end }}
{{- end }}
{{- if $v.persistence.enabled }}
{{- if .spec.registry }}
- --registry-state=/var/lib/baton/registry.json
{{- end }}
{{- if and .spec.store (eq $v.store.backend "memory") }}
- --store-snapshot=/var/lib/baton/store.snapshot
{{- end }}
{{- end }}
- --admin-host={{ $v.listenHost }}
- --admin-port=29000
{{- if $v.admin.tokens.secret }}
- --admin-tokens-file=/etc/baton/admin-tokens/tokens.txt
{{- else }}
# Reading metrics takes no authentication: the NetworkPolicy says who gets there.
- --insecure-admin
{{- end }}
{{- end -}}

{{/* The volumes of a component as {name, mountPath, volume}: {root, component, spec}. */}}
{{- define "baton.volumes" -}}
{{- $v := .root.Values -}}
{{- $name := include "baton.fullname" .root -}}
- { name: config, path: /etc/baton/config, volume: { configMap: { name: {{ $name }}-{{ .component }} } } }
# The executable puts the addon of the notice socket (kv_connector: lmcache) there.
- { name: tmp, path: /tmp, writable: true, volume: { emptyDir: { sizeLimit: 64Mi } } }
{{- if $v.admin.tokens.secret }}
- { name: admin-tokens, path: /etc/baton/admin-tokens, volume: { secret: { secretName: {{ $v.admin.tokens.secret }}, defaultMode: 0440, items: [{ key: tokens.txt, path: tokens.txt }] } } }
{{- end }}
{{- if and .spec.facade $v.apiKeys.secret }}
- { name: api-keys, path: /etc/baton/api-keys, volume: { secret: { secretName: {{ $v.apiKeys.secret }}, defaultMode: 0440, items: [{ key: keys.txt, path: keys.txt }] } } }
{{- end }}
{{- if and .spec.rpc $v.rpc.tokens.secret }}
- { name: tokens, path: /etc/baton/tokens, volume: { secret: { secretName: {{ $v.rpc.tokens.secret }}, defaultMode: 0440, items: [{ key: tokens.txt, path: tokens.txt }] } } }
{{- end }}
{{- if and .spec.calls $v.rpc.tokens.secret }}
- { name: client-token, path: /etc/baton/client-token, volume: { secret: { secretName: {{ $v.rpc.tokens.secret }}, defaultMode: 0440, items: [{ key: client-token, path: client-token }] } } }
{{- end }}
{{- if and (or .spec.rpc .spec.calls) $v.rpc.tls.secret }}
- { name: tls, path: /etc/baton/tls, volume: { secret: { secretName: {{ $v.rpc.tls.secret }}, defaultMode: 0440 } } }
{{- end }}
{{- if and .spec.store (eq $v.store.backend "valkey") }}
{{- if $v.store.valkey.passwordSecret }}
- { name: valkey, path: /etc/baton/valkey, volume: { secret: { secretName: {{ $v.store.valkey.passwordSecret }}, defaultMode: 0440, items: [{ key: password, path: password }] } } }
{{- end }}
{{- if $v.store.valkey.caSecret }}
- { name: valkey-ca, path: /etc/baton/valkey-ca, volume: { secret: { secretName: {{ $v.store.valkey.caSecret }}, defaultMode: 0440, items: [{ key: ca.crt, path: ca.crt }] } } }
{{- end }}
{{- end }}
{{- if include "baton.hasState" . }}
- { name: state, path: /var/lib/baton, writable: true, volume: { persistentVolumeClaim: { claimName: {{ $name }}-{{ .component }} } } }
{{- end }}
{{- end -}}

{{/* Whether a component keeps something in a volume: {root, component, spec}. */}}
{{- define "baton.hasState" -}}
{{- if and .root.Values.persistence.enabled (or .spec.registry (and .spec.store (eq .root.Values.store.backend "memory"))) }}true{{ end -}}
{{- end -}}

{{/* Whether a component talks with the API server: {root, component, spec}. */}}
{{- define "baton.discovers" -}}
{{- if and .spec.registry .root.Values.discovery.selector }}true{{ end -}}
{{- end -}}

{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}
