import { DiscoveryV1Api, KubeConfig, Watch } from '@kubernetes/client-node';
import type { KubernetesConfig } from '../../config/discovery.ts';
import { whyUnread } from '../../config/unread.ts';
import type { SliceApi, SliceEvent, WatchEnd } from './follow.ts';

const PAGE = 500;
/** After this time the server ends a watch, and another one goes on where it ended. */
const WATCH_SECONDS = 240;

/**
 * Talks with the API server of `KUBECONFIG`, of ~/.kube/config, or of the cluster around this pod.
 *
 * @throws Error where none of them tells of a server
 */
export function openSliceApi({ kubeconfig, namespace, selector }: KubernetesConfig): SliceApi {
  const config = loadCluster(kubeconfig);
  const api = config.makeApiClient(DiscoveryV1Api);
  const watcher = new Watch(config);
  const inside = namespace ?? config.getContextObject(config.getCurrentContext())?.namespace ?? 'default';
  const path = `/apis/discovery.k8s.io/v1${inside === '*' ? '' : `/namespaces/${inside}`}/endpointslices`;
  return {
    async list() {
      const items: unknown[] = [];
      let next: string | undefined;
      for (;;) {
        const query = { labelSelector: selector, limit: PAGE, ...(next === undefined ? {} : { _continue: next }) };
        const page = await (inside === '*'
          ? api.listEndpointSliceForAllNamespaces(query)
          : api.listNamespacedEndpointSlice({ namespace: inside, ...query }));
        items.push(...page.items);
        next = page.metadata?._continue || undefined;
        if (next === undefined) return { items, version: page.metadata?.resourceVersion ?? '' };
      }
    },
    watch: (version, onEvent, signal) => watch(watcher, path, { selector, version }, onEvent, signal),
  };
}

/** What the client takes for a cluster where nothing tells of one. */
const NO_CLUSTER = 'http://localhost:8080';

function loadCluster(kubeconfig: string | undefined): KubeConfig {
  const config = new KubeConfig();
  const where = kubeconfig === undefined ? 'KUBECONFIG or ~/.kube/config' : 'discovery.kubernetes.kubeconfig';
  try {
    if (kubeconfig === undefined) config.loadFromDefault();
    else config.loadFromFile(kubeconfig);
  } catch (error) {
    const path = error instanceof Error && 'path' in error ? String(error.path) : undefined;
    const why = path === undefined ? 'this is no kubeconfig' : `${path} ${whyUnread(error)}`;
    throw new Error(`${where}: ${why}`, { cause: error });
  }
  const cluster = config.getCurrentCluster();
  if (cluster !== null && (kubeconfig !== undefined || cluster.server !== NO_CLUSTER)) return config;
  throw new Error(
    kubeconfig === undefined
      ? 'no Kubernetes cluster is known: KUBECONFIG and ~/.kube/config name none, and this is no pod; name a kubeconfig in discovery.kubernetes.kubeconfig'
      : `${where}: ${kubeconfig} names no current cluster (current-context)`,
  );
}

function watch(
  watcher: Watch,
  path: string,
  { selector, version }: { readonly selector: string; readonly version: string },
  onEvent: (event: SliceEvent) => void,
  signal: AbortSignal,
): Promise<WatchEnd> {
  const { promise, resolve, reject } = Promise.withResolvers<WatchEnd>();
  const query = {
    labelSelector: selector,
    resourceVersion: version,
    allowWatchBookmarks: true,
    timeoutSeconds: WATCH_SECONDS,
  };
  let stop: AbortController | undefined;
  const onAbort = () => {
    stop?.abort();
    resolve('ended');
  };
  signal.addEventListener('abort', onAbort, { once: true });
  watcher
    .watch(
      path,
      query,
      (type: string, object: unknown) => {
        if (type === 'ERROR' && codeOf(object) === 410) resolve('gone');
        onEvent({ type, object });
      },
      (error: unknown) => {
        if (codeOf(error) === 410) resolve('gone');
        // A watch on which nothing happened for a while is ended by the client; another one goes on.
        else if (!(error instanceof Error) || error.name === 'TimeoutError' || error.name === 'AbortError')
          resolve('ended');
        else reject(error);
      },
    )
    .then((controller) => {
      stop = controller;
      if (signal.aborted) controller.abort();
    }, reject);
  return promise.finally(() => {
    signal.removeEventListener('abort', onAbort);
    stop?.abort();
  });
}

/** The status of an answer, from an error of the client or a Status of the server. */
export function codeOf(value: unknown): number | undefined {
  if (typeof value !== 'object' || value === null) return undefined;
  if ('statusCode' in value && typeof value.statusCode === 'number') return value.statusCode;
  return 'code' in value && typeof value.code === 'number' ? value.code : undefined;
}
