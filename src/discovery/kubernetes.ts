import { followSlices } from './kubernetes/follow.ts';
import type { MakeSource } from './source.ts';

/** The EndpointSlices of `discovery.kubernetes`; the client of Kubernetes is loaded here and nowhere else. */
export const kubernetesSource: MakeSource = async ({ config }) => {
  const { kubernetes } = config.discovery;
  if (kubernetes === undefined) return undefined;
  const { openSliceApi } = await import('./kubernetes/api.ts');
  return followSlices(openSliceApi(kubernetes), kubernetes, config.instanceDefaults);
};
