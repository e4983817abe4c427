import { connectRemote } from '../../src/rpc/clients.ts';
import type { Harness } from './harness.ts';

/** The instances as the registry of a running baton lists them. */
export async function instancesOf(harness: Harness) {
  using remote = connectRemote({ url: harness.rpcUrl });
  return (await remote.poolRegistry.listInstances({})).instances;
}

/** The one with this URL; throws where there is none. */
export async function instanceAt(harness: Harness, url: string) {
  const found = (await instancesOf(harness)).find((instance) => instance.url === url);
  if (found === undefined) throw new Error(`no instance at ${url}`);
  return found;
}
