import { createHash } from 'node:crypto';
import { mkdirSync, readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { parseAllDocuments } from 'yaml';
import { z } from 'zod';
import { TLS_FOLDER } from './tls.ts';

const DEPLOY = join(import.meta.dirname, '..', '..', 'deploy');
export const CHART = join(DEPLOY, 'helm', 'baton');
/** Folder of the manifests that are rendered from the chart. */
export const MANIFESTS = join(DEPLOY, 'kubernetes');

/** The cases that the chart is rendered for: each has a file of values and one of manifests. */
export const CASES: readonly string[] = readdirSync(join(CHART, 'ci')).map((file) => file.replace('-values.yaml', ''));

const probe = z.strictObject({
  httpGet: z.strictObject({ path: z.string(), port: z.string() }).optional(),
  grpc: z.strictObject({ port: z.number(), service: z.string() }).optional(),
  tcpSocket: z.strictObject({ port: z.string() }).optional(),
  periodSeconds: z.number(),
  timeoutSeconds: z.number().optional(),
  failureThreshold: z.number().optional(),
});

const items = z.array(z.strictObject({ key: z.string(), path: z.string() })).optional();

const volume = z.strictObject({
  name: z.string(),
  configMap: z.strictObject({ name: z.string() }).optional(),
  secret: z.strictObject({ secretName: z.string(), defaultMode: z.number(), items }).optional(),
  emptyDir: z.strictObject({ sizeLimit: z.string() }).optional(),
  persistentVolumeClaim: z.strictObject({ claimName: z.string() }).optional(),
});

const containerSchema = z.object({
  name: z.string(),
  image: z.string(),
  args: z.array(z.string()),
  env: z.array(z.object({ name: z.string() })).default([]),
  ports: z.array(z.strictObject({ name: z.string(), containerPort: z.number() })),
  startupProbe: probe.optional(),
  livenessProbe: probe,
  readinessProbe: probe,
  securityContext: z.unknown(),
  volumeMounts: z.array(
    z.strictObject({ name: z.string(), mountPath: z.string(), readOnly: z.literal(true).optional() }),
  ),
});

const labels = z.record(z.string(), z.string());

/** A Deployment or StatefulSet of the chart. */
export const workloadSchema = z.object({
  kind: z.enum(['Deployment', 'StatefulSet']),
  metadata: z.object({ name: z.string() }),
  spec: z.object({
    replicas: z.number().optional(),
    selector: z.object({ matchLabels: labels }),
    template: z.object({
      metadata: z.object({ labels }),
      spec: z.object({
        serviceAccountName: z.string().optional(),
        automountServiceAccountToken: z.boolean(),
        terminationGracePeriodSeconds: z.number().optional(),
        securityContext: z.unknown(),
        containers: z.array(containerSchema).length(1),
        volumes: z.array(volume),
      }),
    }),
  }),
});

export type Workload = z.output<typeof workloadSchema>;

/** A workload that runs baton. */
export interface BatonWorkload {
  readonly name: string;
  readonly workload: Workload;
  readonly container: z.output<typeof containerSchema>;
}

/** Any object of Kubernetes. */
export interface Manifest {
  readonly kind: string;
  readonly metadata: { readonly name: string };
  readonly [key: string]: unknown;
}

const manifestSchema = z.looseObject({ kind: z.string(), metadata: z.looseObject({ name: z.string() }) });

/** The objects of one case, as they are committed. */
export function readManifests(name: string): readonly Manifest[] {
  const documents = parseAllDocuments(readFileSync(join(MANIFESTS, `${name}.yaml`), 'utf8'));
  return documents.flatMap((document): unknown => document.toJS() ?? []).map((raw) => manifestSchema.parse(raw));
}

/** The Deployments and StatefulSets among objects. */
export function workloadsOf(manifests: readonly Manifest[]): readonly Workload[] {
  return manifests
    .filter(({ kind }) => kind === 'Deployment' || kind === 'StatefulSet')
    .map((manifest) => workloadSchema.parse(manifest));
}

/** Those of them that run baton. */
export function batonsOf(manifests: readonly Manifest[]): readonly BatonWorkload[] {
  return workloadsOf(manifests).flatMap((workload) => {
    const [container] = workload.spec.template.spec.containers;
    return container?.name === 'baton' ? [{ name: workload.metadata.name, workload, container }] : [];
  });
}

/** What every Secret of the cases holds: token, key and password. */
export const SECRET = 'not-so-secret';
const HASH = `sha256:${createHash('sha256').update(SECRET).digest('hex')}`;
const pem = (name: string) => readFileSync(join(TLS_FOLDER, name), 'utf8');

/** The Secrets that the cases name, as docs/kubernetes.md says how to make them. */
const SECRETS: Readonly<Record<string, Readonly<Record<string, string>>>> = {
  'baton-tokens': { 'tokens.txt': `roles ${HASH} any-tenant operator\n`, 'client-token': SECRET },
  'baton-admin-tokens': { 'tokens.txt': `prometheus ${HASH}\n`, 'scrape-token': SECRET },
  'baton-api-keys': { 'keys.txt': `team-a ${HASH}\n` },
  'baton-tls': { 'tls.crt': pem('server.pem'), 'tls.key': pem('server.key'), 'ca.crt': pem('ca.pem') },
  'baton-valkey': { password: SECRET },
  'baton-valkey-ca': { 'ca.crt': pem('ca.pem') },
};

/**
 * Lays a pod's file system out in `root`, as its volumes and mounts say, and gives the arguments of its container with paths
 * in there. What no volume brings is not there. Names of Services become the addresses of `services`.
 */
export function layPod(
  { workload, container }: BatonWorkload,
  manifests: readonly Manifest[],
  root: string,
  services: ReadonlyMap<string, string> = new Map(),
): string[] {
  const moved = (text: string) =>
    text
      .replaceAll(/\/(etc|var\/lib)\/baton/g, (path) => `${root}${path}`)
      .replaceAll(/(?<=:\/\/)(baton-\w+):\d+/g, (whole, name) => services.get(name) ?? whole);
  for (const { name, mountPath } of container.volumeMounts) {
    const source = workload.spec.template.spec.volumes.find((each) => each.name === name);
    if (source === undefined) throw new Error(`${container.name} mounts ${name}, and there is no such volume`);
    const folder = `${root}${mountPath}`;
    mkdirSync(folder, { recursive: true });
    const files =
      source.configMap !== undefined
        ? Object.entries(configMapOf(manifests, source.configMap.name))
        : Object.entries(SECRETS[source.secret?.secretName ?? ''] ?? {}).filter(
            ([key]) => source.secret?.items?.some((item) => item.key === key) ?? true,
          );
    for (const [file, text] of files) writeFileSync(join(folder, file), moved(text));
  }
  return container.args.map(moved);
}

const configMapSchema = z.object({ data: z.record(z.string(), z.string()) });

function configMapOf(manifests: readonly Manifest[], name: string): Readonly<Record<string, string>> {
  const found = manifests.find(({ kind, metadata }) => kind === 'ConfigMap' && metadata.name === name);
  return configMapSchema.parse(found).data;
}
