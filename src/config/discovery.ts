import type { InstanceRole } from '../core/instance-spec.ts';
import type { InstanceConfig } from './config.ts';
import { field, optional, section } from './fields.ts';
import { parseServerUrl } from './instance-url.ts';
import { bad, choiceParser, listParser, ok, parseDuration, parseText, show, type ValueParser } from './values.ts';

/** What instances have by their role, unless they say otherwise. */
export type InstanceDefaults = Readonly<Record<InstanceRole, Omit<InstanceConfig, 'id' | 'url' | 'role' | 'lmcache'>>>;

/** A name whose addresses are engines. */
export interface DnsName {
  readonly kind: 'address' | 'srv';
  readonly name: string;
  readonly scheme: 'http' | 'https';
  /** Of every address; absent for `srv`, whose answer tells. */
  readonly port?: number;
  /** Behind host and port of every URL, empty or beginning with a slash. */
  readonly prefix: string;
}

/** EndpointSlices of a Kubernetes cluster. */
export interface KubernetesConfig {
  /** Label selector of the slices, as the API takes it. */
  readonly selector: string;
  /** `*` for all; absent: that of the kubeconfig's context, or of the pod. */
  readonly namespace?: string;
  /** Label of a slice whose value is the role. */
  readonly roleLabel: string;
  /** Name or number of the port; absent: the first. */
  readonly port?: string;
  readonly scheme: 'http' | 'https';
  readonly kubeconfig?: string;
}

/** Where instances come from beside the settings; files are paths as given, durations in milliseconds. */
export interface DiscoveryConfig {
  readonly file?: string;
  readonly dns: Readonly<Record<InstanceRole, readonly DnsName[]>>;
  readonly dnsIntervalMs: number;
  readonly kubernetes?: KubernetesConfig;
}

/** Names of the sources in the settings that ask something over the network. */
export function remoteSources({ dns, kubernetes }: DiscoveryConfig): readonly string[] {
  return [
    ...(Object.values(dns).some((list) => list.length > 0) ? ['dns'] : []),
    ...(kubernetes === undefined ? [] : ['kubernetes']),
  ];
}

/** Reads `[http(s)://]name:port[/prefix]`, or `[http(s)://]_service._proto.name[/prefix]` for an SRV record. */
export const parseDnsName: ValueParser<DnsName> = (raw) => {
  const text = typeof raw === 'string' ? raw.trim() : '';
  const written = /^https?:\/\//i.test(text) ? text : `http://${text}`;
  const [, service, rest = ''] = /^https?:\/\/(_[a-z0-9-]+\._(?:tcp|udp)\.)(.*)$/i.exec(written) ?? [];
  const scheme = /^https:/i.test(written) ? 'https' : 'http';
  const url = parseServerUrl(service === undefined ? written : `${scheme}://${rest}`);
  const wanted = 'expected "name:port", or "_service._tcp.name" for an SRV record';
  if (url.kind === 'bad') return bad(`${wanted}, got ${show(raw)}`);
  const { hostname, port, pathname } = new URL(url.value.url);
  const prefix = pathname.replace(/\/+$/, '');
  if (service !== undefined) {
    if (/:\d+(\/|$)/.test(rest)) return bad(`an SRV record tells the port itself: leave it out of ${show(raw)}`);
    return ok({ kind: 'srv', name: `${service.toLowerCase()}${hostname}`, scheme, prefix });
  }
  if (!/:\d+(\/|$)/.test(text)) return bad(`${wanted}, got ${show(raw)}`);
  return ok({
    kind: 'address',
    name: hostname,
    scheme,
    port: Number(port === '' ? defaultPort(scheme) : port),
    prefix,
  });
};

function defaultPort(scheme: DnsName['scheme']): number {
  return scheme === 'https' ? 443 : 80;
}

const names = (what: string) =>
  optional(
    listParser(parseDnsName),
    'none',
    `Names whose addresses are ${what}: \`name:port\` for A and AAAA records, \`_service._tcp.name\` for SRV records.`,
  );

/** Keys of `discovery`. */
export const discoveryKeys = {
  file: optional(parseText, 'none', 'File with more `instances`, read again whenever it changes.'),
  dns: section({
    prefill: names('prefill engines'),
    decode: names('decode engines'),
    both: names('engines that do both'),
    interval: field(parseDuration, '10s', 'Between two look-ups.'),
  }),
  kubernetes: section({
    selector: optional(
      parseText,
      'none',
      'Label selector of the EndpointSlices whose endpoints are engines; a slice has the labels of its service.',
    ),
    namespace: optional(parseText, 'that of the kubeconfig or of the pod', 'Namespace of the slices; `*` for all.'),
    role_label: field(
      parseText,
      'llm-d.ai/role',
      'Label of a slice that tells the role: `prefill`, `decode` or `both` (`prefill-decode`).',
    ),
    port: optional(parseText, 'the first', "Name or number of the slices' port."),
    scheme: field(choiceParser(['http', 'https']), 'http', 'How the engines are spoken to.'),
    kubeconfig: optional(
      parseText,
      '`KUBECONFIG`, `~/.kube/config`, or the cluster around the pod',
      'File that tells of the API server.',
    ),
  }),
};
