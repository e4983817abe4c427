import { lookup, resolveSrv } from 'node:dns/promises';
import type { InstanceConfig } from '../config/config.ts';
import { type DnsName, type InstanceDefaults, remoteSources } from '../config/discovery.ts';
import { parseServerUrl } from '../config/instance-url.ts';
import type { InstanceRole } from '../core/instance-spec.ts';
import { pause } from '../services/pause.ts';
import type { InstanceSource, MakeSource, SourceSink } from './source.ts';

/** A host, IPv6 without brackets, and a port. */
interface HostPort {
  readonly host: string;
  readonly port: number;
}

/** The two questions that are asked of DNS; both reject as Node's do. */
export interface DnsQuestions {
  /** As the system resolves names: /etc/hosts and search domains count. */
  readonly addresses: (name: string) => Promise<readonly string[]>;
  readonly services: (name: string) => Promise<readonly HostPort[]>;
}

/** What DNS is followed by. */
export interface DnsOptions {
  readonly names: Readonly<Record<InstanceRole, readonly DnsName[]>>;
  readonly defaults: InstanceDefaults;
  readonly intervalMs: number;
  /** Default the resolver of Node. */
  readonly ask?: DnsQuestions;
}

const NODE: DnsQuestions = {
  addresses: async (name) => (await lookup(name, { all: true })).map(({ address }) => address),
  services: async (name) => (await resolveSrv(name)).map(({ name: host, port }) => ({ host, port })),
};

/** The names of `discovery.dns`. */
export const dnsSource: MakeSource = ({ config }) => {
  const { dns, dnsIntervalMs } = config.discovery;
  if (!remoteSources(config.discovery).includes('dns')) return undefined;
  return followDns({ names: dns, defaults: config.instanceDefaults, intervalMs: dnsIntervalMs });
};

/**
 * Asks for each name again and again. A name that answers nothing, or not at all, keeps the instances that it had: a name
 * server that is away is no reason to take engines out. An interval of 0 asks once, and goes on only where that failed.
 */
export function followDns({ names, defaults, intervalMs, ask = NODE }: DnsOptions): InstanceSource {
  const targets = Object.entries(names).flatMap(([role, list]) =>
    list.map((name) => new Target(name, defaults, roleOf(role), ask)),
  );
  return {
    name: 'dns',
    run: async (sink, signal) => {
      while (!signal.aborted) {
        await Promise.race([Promise.all(targets.map((target) => target.look(sink))), aborted(signal)]);
        if (signal.aborted) return;
        if (targets.some(({ isKnown }) => isKnown)) sink.view(targets.flatMap(({ instances }) => instances));
        if (intervalMs === 0 && targets.every(({ isKnown }) => isKnown)) return;
        await pause(intervalMs === 0 ? RETRY_MS : intervalMs, signal);
      }
    },
  };
}

const RETRY_MS = 5000;

class Target {
  instances: readonly InstanceConfig[] = [];
  /** It answered at least once. */
  isKnown = false;
  readonly #name: DnsName;
  readonly #defaults: InstanceDefaults;
  readonly #role: InstanceRole;
  readonly #ask: DnsQuestions;
  #complaint = '';

  constructor(name: DnsName, defaults: InstanceDefaults, role: InstanceRole, ask: DnsQuestions) {
    this.#name = name;
    this.#defaults = defaults;
    this.#role = role;
    this.#ask = ask;
  }

  async look(sink: SourceSink): Promise<void> {
    try {
      const places = await this.#places();
      if (places.length === 0) {
        this.#complain(sink, 'it has no addresses');
        return;
      }
      this.instances = places.flatMap((place) => this.#instanceAt(place));
      this.isKnown = true;
      this.#complaint = '';
    } catch (error) {
      this.#complain(sink, error instanceof Error && 'code' in error ? String(error.code) : String(error));
    }
  }

  async #places(): Promise<readonly HostPort[]> {
    const { kind, name, port } = this.#name;
    if (kind === 'srv' || port === undefined) return this.#ask.services(name);
    return (await this.#ask.addresses(name)).map((host) => ({ host, port }));
  }

  #instanceAt({ host, port }: HostPort): readonly InstanceConfig[] {
    const { scheme, prefix } = this.#name;
    const parsed = parseServerUrl(`${scheme}://${host.includes(':') ? `[${host}]` : host}:${port}${prefix}`);
    return parsed.kind === 'bad' ? [] : [{ ...this.#defaults[this.#role], ...parsed.value, role: this.#role }];
  }

  #complain(sink: SourceSink, what: string): void {
    // Once while it goes on.
    if (what === this.#complaint) return;
    this.#complaint = what;
    const kept = this.isKnown ? 'its last addresses stay' : 'it has no instances yet';
    sink.warn({ name: this.#name.name, answer: what }, `DNS tells nothing of a name; ${kept}`);
  }
}

function roleOf(role: string): InstanceRole {
  return role === 'prefill' || role === 'decode' ? role : 'both';
}

function aborted(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal.aborted) resolve();
    else signal.addEventListener('abort', () => resolve(), { once: true });
  });
}
