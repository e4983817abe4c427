import { InstanceState, Role } from '../../gen/baton/v1/instance_pb.ts';

/** A role as the word that logs, metrics and the configuration use; `unspecified` for one that is not known. */
export function roleWord(role: Role): string {
  switch (role) {
    case Role.PREFILL:
      return 'prefill';
    case Role.DECODE:
      return 'decode';
    case Role.BOTH:
      return 'both';
    default:
      return 'unspecified';
  }
}

/** A state as the word that logs and metrics use; `unspecified` for one that is not known. */
export function stateWord(state: InstanceState): string {
  switch (state) {
    case InstanceState.STARTING:
      return 'starting';
    case InstanceState.READY:
      return 'ready';
    case InstanceState.SUSPECT:
      return 'suspect';
    case InstanceState.DRAINING:
      return 'draining';
    case InstanceState.GONE:
      return 'gone';
    default:
      return 'unspecified';
  }
}
