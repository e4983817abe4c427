import * as z from 'zod';
import type { InstanceConfig } from '../../config/config.ts';
import type { InstanceDefaults, KubernetesConfig } from '../../config/discovery.ts';
import { parseServerUrl } from '../../config/instance-url.ts';
import type { InstanceRole } from '../../core/instance-spec.ts';

// Clients leave members out that are null on the wire, and the other way round.
const text = z.string().nullish();

const sliceSchema = z.object({
  metadata: z.object({
    name: z.string(),
    namespace: text,
    resourceVersion: text,
    labels: z.record(z.string(), z.string()).nullish(),
  }),
  addressType: z.string(),
  endpoints: z
    .array(
      z.object({
        addresses: z.array(z.string()),
        conditions: z.object({ ready: z.boolean().nullish() }).nullish(),
        targetRef: z.object({ name: text }).nullish(),
      }),
    )
    .nullish(),
  ports: z.array(z.object({ name: text, port: z.number().nullish() })).nullish(),
});

/** The part of an EndpointSlice (discovery.k8s.io/v1) that tells of engines. */
export type Slice = z.output<typeof sliceSchema>;

/** Reads an EndpointSlice; undefined for what is none. */
export function readSlice(raw: unknown): Slice | undefined {
  const parsed = sliceSchema.safeParse(raw);
  return parsed.success ? parsed.data : undefined;
}

/** Name of a slice among those of all namespaces. */
export function sliceKey({ metadata }: Slice): string {
  return `${metadata.namespace ?? ''}/${metadata.name}`;
}

const ROLES: ReadonlyMap<string, InstanceRole> = new Map([
  ['prefill', 'prefill'],
  ['decode', 'decode'],
  ['both', 'both'],
  // llm-d's words for an engine that does both.
  ['prefill-decode', 'both'],
  ['decode-prefill', 'both'],
]);

/** The engines of slices, and why some slices tell none. */
export interface SliceView {
  readonly instances: readonly InstanceConfig[];
  readonly problems: readonly string[];
}

/**
 * Reads the engines out of slices: each ready endpoint is one. An endpoint may stand in two slices, while they are rearranged,
 * or for its IPv4 and its IPv6 address; it counts once, with IPv4 before IPv6.
 */
export function instancesOf(slices: Iterable<Slice>, config: KubernetesConfig, defaults: InstanceDefaults): SliceView {
  const instances = new Map<string, InstanceConfig>();
  const pods = new Map<string, string>();
  const problems: string[] = [];
  for (const slice of [...slices].sort((a, b) => (a.addressType < b.addressType ? -1 : 1))) {
    const labels = slice.metadata.labels ?? {};
    const word = labels[config.roleLabel];
    const role = word === undefined ? undefined : ROLES.get(word);
    const port = portOf(slice, config.port);
    if (role === undefined || port === undefined) {
      const what =
        role === undefined
          ? `the label ${config.roleLabel} is ${word === undefined ? 'not set' : `"${word}"`}; prefill, decode or both`
          : `there is no port ${config.port ?? ''}`.trimEnd();
      problems.push(`${sliceKey(slice)}: ${what}`);
      continue;
    }
    for (const { addresses, conditions, targetRef } of slice.endpoints ?? []) {
      const [address] = addresses;
      // A pod that ends is not ready any more, nor is one that fails its own readiness check.
      if (address === undefined || conditions?.ready === false) continue;
      const host = address.includes(':') ? `[${address}]` : address;
      const url = parseServerUrl(`${config.scheme}://${host}:${port}`);
      if (url.kind === 'bad') continue;
      const pod = targetRef?.name;
      const key = `${slice.metadata.namespace ?? ''}/${pod ?? url.value.id}:${port}`;
      if (pods.has(key) && pods.get(key) !== slice.addressType) continue;
      pods.set(key, slice.addressType);
      instances.set(url.value.id, {
        ...defaults[role],
        ...url.value,
        role,
        labels: {
          ...defaults[role].labels,
          ...ownLabels(labels),
          ...(pod === undefined || pod === null ? {} : { pod }),
        },
      });
    }
  }
  return { instances: [...instances.values()], problems };
}

function portOf({ ports }: Slice, wanted: string | undefined): number | undefined {
  const found = ports?.find(({ name, port }) => wanted === undefined || wanted === name || wanted === String(port));
  return found?.port ?? undefined;
}

/** Labels of the service; those that Kubernetes itself adds tell nothing of an engine. */
function ownLabels(labels: Readonly<Record<string, string>>): Readonly<Record<string, string>> {
  return Object.fromEntries(Object.entries(labels).filter(([name]) => !/(^|\.)kubernetes\.io\//.test(name)));
}
