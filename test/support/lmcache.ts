import { setTimeout } from 'node:timers/promises';
import type { Config } from '../../src/config/config.ts';
import { StartError } from '../../src/roles/listen.ts';
import type { SimOptions } from '../../src/sim/options.ts';
import { type Sim, startSim } from '../../src/sim/start-sim.ts';
import { freePort } from './free-port.ts';
import { configOf, startQuietly } from './harness.ts';

/** baton with the lmcache connector, in front of simulated engines that the test controls. */
export interface LmcacheHarness extends AsyncDisposable {
  readonly url: string;
  readonly adminUrl: string;
  readonly prefill: readonly Sim[];
  readonly decode: readonly Sim[];
  /** An aggregated engine with the same weights: what every answer must equal. */
  readonly plain: Sim;
  readonly log: readonly Readonly<Record<string, unknown>>[];
  readonly config: Config;
  /** `tcp://host:port` of the notice socket. */
  readonly notices: string;
  /** Stops baton and starts it again on the same notice port; `url` changes. */
  restart(meanwhile?: () => Promise<void>): Promise<string>;
}

export interface LmcacheOptions {
  readonly prefill?: number;
  readonly decode?: number;
  readonly ranks?: number;
  readonly engine?: Omit<SimOptions, 'role' | 'port'>;
  /** What prefill engines have besides. */
  readonly prefillEngine?: Omit<SimOptions, 'role' | 'port'>;
  /** More of a configuration file. */
  readonly yaml?: string;
  /** More keys of its `lmcache` section, in YAML's flow style. */
  readonly lmcache?: string;
  readonly env?: Readonly<Record<string, string>>;
}

/** Starts engines and baton; defaults: two of each pool, one rank. */
export async function startLmcache(options: LmcacheOptions = {}): Promise<LmcacheHarness> {
  await using stack = new AsyncDisposableStack();
  const port = await freePort();
  const notices = `tcp://127.0.0.1:${port}`;
  const ranks = options.ranks ?? 1;
  const startPool = (role: 'prefill' | 'decode', count: number) =>
    Promise.all(
      Array.from({ length: count }, async () => {
        const own = role === 'prefill' ? options.prefillEngine : {};
        const common = { connector: 'lmcache', noticeEndpoint: notices, recordRequests: true, ranks } as const;
        const sim = await startSim({ ...common, ...options.engine, ...own, role });
        stack.defer(() => sim.close());
        return sim;
      }),
    );
  const prefill = await startPool('prefill', options.prefill ?? 2);
  const decode = await startPool('decode', options.decode ?? 2);
  const plain = await startSim({ ...options.engine, role: 'both', connector: 'none' });
  stack.defer(() => plain.close());
  const list = (ports: readonly number[]) => `[${ports.join(', ')}]`;
  const instances = [
    ...prefill.map(({ url }) => `  - { url: "${url}", role: prefill }`),
    ...decode.map(
      ({ url, receiverPorts: { init, alloc } }) =>
        `  - { url: "${url}", role: decode, lmcache: { init_ports: ${list(init)}, alloc_ports: ${list(alloc)} } }`,
    ),
  ];
  const extra = options.lmcache === undefined ? '' : `, ${options.lmcache}`;
  const yaml = [
    'kv_connector: lmcache',
    `lmcache: { proxy_host: 127.0.0.1, proxy_port: ${port}${extra} }`,
    'instances:',
    ...instances,
    options.yaml ?? '',
  ].join('\n');
  const config = configOf({}, yaml, options.env);
  let { baton, log } = await startQuietly(config);
  stack.defer(() => baton.stop());
  const resources = stack.move();
  return {
    url: `http://${baton.addresses.facade}`,
    adminUrl: `http://${baton.addresses.admin}`,
    prefill,
    decode,
    plain,
    log,
    config,
    notices,
    async restart(meanwhile) {
      await baton.stop();
      await meanwhile?.();
      ({ baton, log } = await startOnceFree(config));
      return `http://${baton.addresses.facade}`;
    },
    [Symbol.asyncDispose]: () => resources.disposeAsync(),
  };
}

/** ZMQ frees a port a moment after its socket is closed; the end of a process would. */
async function startOnceFree(config: Config): ReturnType<typeof startQuietly> {
  for (let tries = 0; ; tries++) {
    try {
      return await startQuietly(config);
    } catch (error) {
      if (tries === 100 || !(error instanceof StartError) || !error.message.includes('in use')) throw error;
      await setTimeout(50);
    }
  }
}
