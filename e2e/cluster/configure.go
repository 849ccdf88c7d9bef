package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"chandler.dev/e2e/machine"
)

// Paths of the node's configuration.
const (
	kubernetesDir    = "/etc/kubernetes"
	pkiDir           = kubernetesDir + "/pki"
	kubeletConfig    = kubernetesDir + "/kubelet.yaml"
	admissionConfig  = kubernetesDir + "/admission.yaml"
	auditPolicy      = kubernetesDir + "/audit.yaml"
	containerdConfig = "/etc/containerd/config.toml"
	cniConfig        = "/etc/cni/net.d/10-pods.conflist"

	containerdSocket = "/run/containerd/containerd.sock"
)

// AuditLog is the file on the first node with the requests of the users in Config.Audit. The API
// server appends an audit.k8s.io/v1 Event in JSON to it as it answers a request.
const AuditLog = "/var/log/kubernetes/audit.log"

// PauseImage is an image on each node with a program that does nothing.
const PauseImage = "localhost/pause:1"

// configure writes the configuration of all components, and the administrator's kubeconfig.
func (c *Cluster) configure() (err error) {
	if c.ca, err = newAuthority(); err != nil {
		return fmt.Errorf("certificate authority: %w", err)
	}
	files := map[string][]byte{admissionConfig: []byte(c.admissionYAML()), auditPolicy: []byte(c.auditYAML())}
	if err := c.addIdentities(files, c.ca); err != nil {
		return err
	}
	if err := c.writeFiles(files); err != nil {
		return err
	}
	if err := c.Node.configure(c.ca); err != nil {
		return err
	}
	return c.configureAdmin(c.ca)
}

// configure writes the configuration of containerd and the kubelet.
func (n *Node) configure(ca *authority) error {
	files := map[string][]byte{
		pkiDir + "/ca.crt": ca.pem,
		cniConfig:          fmt.Appendf(nil, cniNetwork, n.podNetwork()),
		containerdConfig:   []byte(n.containerdTOML()),
	}
	var err error
	if files[kubeletConfig], err = n.kubeletYAML(); err != nil {
		return fmt.Errorf("kubelet: %w", err)
	}
	if err := addKubeconfig(files, "kubelet", ca, "system:node:"+n.name, "system:nodes"); err != nil {
		return err
	}
	return n.writeFiles(files)
}

// writeFiles writes files of the node.
func (n *Node) writeFiles(files map[string][]byte) error {
	for path, content := range files {
		outside := filepath.Join(n.dir, path)
		if err := os.MkdirAll(filepath.Dir(outside), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(outside, content, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// addIdentities adds keys, certificates and kubeconfigs of the control plane, with the usual
// users.
func (c *Cluster) addIdentities(files map[string][]byte, ca *authority) error {
	add := func(name string, id identity, err error) error {
		files[pkiDir+"/"+name+".crt"], files[pkiDir+"/"+name+".key"] = id.cert, id.key
		return err
	}
	id, err := ca.server("kube-apiserver", "localhost", "127.0.0.1", NodeIP, serviceIP,
		"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
	if err := add("apiserver", id, err); err != nil {
		return fmt.Errorf("API server's certificate: %w", err)
	}
	id, err = ca.client("kube-apiserver-kubelet-client", "system:masters")
	if err := add("apiserver-kubelet-client", id, err); err != nil {
		return fmt.Errorf("API server's certificate for the kubelet: %w", err)
	}
	if _, files[pkiDir+"/sa.key"], err = newKey(); err != nil {
		return fmt.Errorf("key of service accounts: %w", err)
	}
	return errors.Join(
		addKubeconfig(files, "kube-controller-manager", ca, "system:kube-controller-manager"),
		addKubeconfig(files, "kube-scheduler", ca, "system:kube-scheduler"),
	)
}

// addKubeconfig adds the kubeconfig of a component, with a certificate for the given user.
func addKubeconfig(files map[string][]byte, component string, ca *authority, user string, groups ...string) error {
	id, err := ca.client(user, groups...)
	if err != nil {
		return fmt.Errorf("certificate of %s: %w", component, err)
	}
	if files[kubeconfigOf(component)], err = clientcmd.Write(kubeconfig(APIServer, ca, id)); err != nil {
		return fmt.Errorf("kubeconfig of %s: %w", component, err)
	}
	return nil
}

func kubeconfigOf(component string) string { return kubernetesDir + "/" + component + ".kubeconfig" }

func kubeconfig(address string, ca *authority, id identity) api.Config {
	const name = "chandler-e2e"
	return api.Config{
		Clusters:       map[string]*api.Cluster{name: {Server: "https://" + address, CertificateAuthorityData: ca.pem}},
		AuthInfos:      map[string]*api.AuthInfo{name: {ClientCertificateData: id.cert, ClientKeyData: id.key}},
		Contexts:       map[string]*api.Context{name: {Cluster: name, AuthInfo: name}},
		CurrentContext: name,
	}
}

// configureAdmin writes the administrator's kubeconfig and creates the client for the host.
func (c *Cluster) configureAdmin(ca *authority) error {
	id, err := ca.client("admin", "system:masters")
	if err != nil {
		return fmt.Errorf("administrator's certificate: %w", err)
	}
	config := kubeconfig(c.machine.Published(), ca, id)
	if err := clientcmd.WriteToFile(config, c.Kubeconfig()); err != nil {
		return fmt.Errorf("administrator's kubeconfig: %w", err)
	}
	c.rest = &rest.Config{
		Host:            "https://" + c.machine.Published(),
		TLSClientConfig: rest.TLSClientConfig{CAData: ca.pem, CertData: id.cert, KeyData: id.key},
		QPS:             -1, // no limit, since there are no other clients
	}
	c.client, err = kubernetes.NewForConfig(c.rest)
	return err
}

func (c *Cluster) removeKubeconfig() error {
	if err := os.Remove(c.Kubeconfig()); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

func etcdArgs() []string { return []string{"--data-dir", "/var/lib/etcd"} }

func (c *Cluster) apiserverArgs() []string {
	return append(c.gateArgs(),
		"--admission-control-config-file="+admissionConfig,
		"--advertise-address="+NodeIP,
		"--allow-privileged=true",
		"--audit-log-path="+AuditLog,
		"--audit-policy-file="+auditPolicy,
		"--authorization-mode=Node,RBAC",
		"--client-ca-file="+pkiDir+"/ca.crt",
		"--enable-admission-plugins=NodeRestriction",
		"--etcd-servers=http://127.0.0.1:2379",
		"--kubelet-client-certificate="+pkiDir+"/apiserver-kubelet-client.crt",
		"--kubelet-client-key="+pkiDir+"/apiserver-kubelet-client.key",
		"--kubelet-preferred-address-types=InternalIP",
		"--runtime-config="+switches(c.cfg.RuntimeConfig),
		"--secure-port=6443",
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file="+pkiDir+"/sa.key",
		"--service-account-signing-key-file="+pkiDir+"/sa.key",
		"--service-cluster-ip-range="+serviceNetwork,
		"--shutdown-delay-duration=0s",
		"--tls-cert-file="+pkiDir+"/apiserver.crt",
		"--tls-private-key-file="+pkiDir+"/apiserver.key",
	)
}

// admissionYAML sets the default Pod Security Standard of namespaces.
func (c *Cluster) admissionYAML() string {
	return fmt.Sprintf(`apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
- name: PodSecurity
  configuration:
    apiVersion: pod-security.admission.config.k8s.io/v1
    kind: PodSecurityConfiguration
    defaults: {enforce: %q, enforce-version: latest}
`, cmp.Or(c.cfg.PodSecurity, "privileged"))
}

// auditYAML records the requests of the users in Config.Audit without their objects.
func (c *Cluster) auditYAML() string {
	var rules strings.Builder
	for _, user := range c.cfg.Audit {
		fmt.Fprintf(&rules, "- {level: Metadata, users: [%q]}\n", user)
	}
	return fmt.Sprintf(`apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
%s- {level: None}
`, rules.String())
}

func (c *Cluster) controllerManagerArgs() []string {
	return append(append(c.clientArgs("kube-controller-manager"), c.cfg.ControllerManager...),
		"--kube-api-burst=400",
		"--kube-api-qps=200",
		"--flex-volume-plugin-dir=/var/lib/kubelet/volumeplugins",
		"--root-ca-file="+pkiDir+"/ca.crt",
		"--service-account-private-key-file="+pkiDir+"/sa.key",
		"--use-service-account-credentials=true",
	)
}

func (c *Cluster) schedulerArgs() []string { return c.clientArgs("kube-scheduler") }

// clientArgs returns the common arguments of the API server's clients in the control plane.
// Leader election is unnecessary, because each component has one instance.
func (c *Cluster) clientArgs(component string) []string {
	return append(c.gateArgs(),
		"--authentication-kubeconfig="+kubeconfigOf(component),
		"--authorization-kubeconfig="+kubeconfigOf(component),
		"--bind-address=127.0.0.1",
		"--kubeconfig="+kubeconfigOf(component),
		"--leader-elect=false",
	)
}

func (c *Cluster) gateArgs() []string {
	if len(c.cfg.FeatureGates) == 0 {
		return nil
	}
	return []string{"--feature-gates=" + switches(c.cfg.FeatureGates)}
}

// switches returns a map in the syntax of Kubernetes flags, sorted by name.
func switches(on map[string]bool) string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(on)) {
		list = append(list, name+"="+strconv.FormatBool(on[name]))
	}
	return strings.Join(list, ",")
}

func (n *Node) kubeletArgs() []string {
	return []string{
		"--config=" + kubeletConfig,
		"--hostname-override=" + n.name,
		"--kubeconfig=" + kubeconfigOf("kubelet"),
		"--node-ip=" + n.ip,
	}
}

func (n *Node) kubeletYAML() ([]byte, error) {
	config := map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1",
		"kind":       "KubeletConfiguration",
		"authentication": map[string]any{
			"anonymous": map[string]any{"enabled": false},
			"webhook":   map[string]any{"enabled": true},
			"x509":      map[string]any{"clientCAFile": pkiDir + "/ca.crt"},
		},
		"authorization":            map[string]any{"mode": "Webhook"},
		"cgroupDriver":             "cgroupfs",             // the machine has no systemd
		"clusterDNS":               []string{"10.96.0.10"}, // no server; without an address, each pod gets a warning
		"clusterDomain":            "cluster.local",
		"containerRuntimeEndpoint": "unix://" + containerdSocket,
		"enforceNodeAllocatable":   []string{},
		// The disk belongs to the host. A full disk must not evict pods or images.
		"evictionHard":                map[string]string{"nodefs.available": "1%", "imagefs.available": "1%"},
		"imageGCHighThresholdPercent": 100,
		"imageGCLowThresholdPercent":  99,
		"failCgroupV1":                false,
		"failSwapOn":                  false,
		"featureGates":                n.cfg.FeatureGates,
		// Many tests wait until the node reports its allocatable devices. The default is ten seconds.
		"nodeStatusUpdateFrequency": "1s",
		"resolvConf":                "",
		"volumePluginDir":           "/var/lib/kubelet/volumeplugins", // the default is in /usr
	}
	maps.Copy(config, n.cfg.Kubelet)
	return yaml.Marshal(config)
}

// containerdTOML enables CDI with the default directories. restrict_oom_score_adj supports
// hosts that do not permit a lower OOM score. The disabled plugins are not used, and would
// take time for probes or send reports elsewhere.
func (n *Node) containerdTOML() string {
	return fmt.Sprintf(`version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.internal.v1.tracing",
  "io.containerd.snapshotter.v1.blockfile",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs",
  "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
address = %q

[plugins.'io.containerd.cri.v1.images']
snapshotter = %q

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = %q

[plugins.'io.containerd.cri.v1.runtime']
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
restrict_oom_score_adj = true

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = [%q]
conf_dir = %q
`, containerdSocket, n.snapshotter(), PauseImage, n.cfg.Programs.CNI, filepath.Dir(cniConfig))
}

// snapshotter returns overlayfs, or native if the state itself is on an overlay, as in a
// container.
func (n *Node) snapshotter() string {
	var fs unix.Statfs_t
	if err := unix.Statfs(n.dir, &fs); err == nil && fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
		return "native"
	}
	return "overlayfs"
}

// cniNetwork connects each pod to the node by a pair of interfaces.
const cniNetwork = `{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [
    {
      "type": "ptp",
      "ipMasq": false,
      "ipam": {
        "type": "host-local",
        "dataDir": "/var/lib/cni/networks",
        "ranges": [[{"subnet": %q}]],
        "routes": [{"dst": "0.0.0.0/0"}]
      }
    }
  ]
}
`

// environment returns the environment variables of each component. containerd uses PATH to
// find its shim and runc.
func (n *Node) environment() []string {
	path := []string{machine.ProgramDir, n.cfg.Programs.Runc, "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}
	return []string{"PATH=" + strings.Join(path, ":"), "HOME=/run"}
}
