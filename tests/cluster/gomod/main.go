// Command kube holds every Kubernetes component that a test cluster runs in one
// binary, so that the code they share is compiled and linked once. It acts as
// the component it is called by (a symbolic link), or as its first argument.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	helmcmd "helm.sh/helm/v4/pkg/cmd"
	helmkube "helm.sh/helm/v4/pkg/kube"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	kubectlcmd "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	_ "time/tzdata" // time zones of CronJobs on machines without a zone database

	_ "k8s.io/client-go/plugin/pkg/client/auth"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
)

// Constructors register flags in sets that the whole process shares, so these
// are functions: only the chosen component's constructor is ever called.
var components = map[string]func() int{
	"etcd":                    runEtcd,
	"helm":                    runHelm,
	"kube-apiserver":          daemon(apiserver.NewAPIServerCommand),
	"kube-controller-manager": daemon(controllermanager.NewControllerManagerCommand),
	"kube-proxy":              daemon(proxy.NewProxyCommand),
	"kube-scheduler":          daemon(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubectl":                 runKubectl,
	"kubelet":                 daemon(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
}

func daemon(command func() *cobra.Command) func() int {
	return func() int { return cli.Run(command()) }
}

func runEtcd() int {
	etcdmain.Main(os.Args)
	return 0
}

func runHelm() int {
	// Upgrades must find the field manager that the released helm writes.
	helmkube.ManagedFieldsManager = "helm"
	command, err := helmcmd.NewRootCmd(os.Stdout, os.Args[1:], helmcmd.SetupLogging)
	if err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		return 1
	}
	if err := command.Execute(); err != nil { // cobra has printed it
		return 1
	}
	return 0
}

func runKubectl() int {
	// Client logs obey -v before the flags are parsed, as in the released kubectl.
	if _, err := logs.GlogSetter(kubectlcmd.GetLogVerbosity(os.Args)); err != nil {
		fmt.Fprintln(os.Stderr, "kubectl:", err)
	}
	if err := cli.RunNoErrOutput(kubectlcmd.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err) // prints and exits with kubectl's own codes
	}
	return 0
}

func main() {
	run, known := components[filepath.Base(os.Args[0])]
	if !known && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		run, known = components[os.Args[0]]
	}
	if !known {
		names := make([]string, 0, len(components))
		for name := range components {
			names = append(names, name)
		}
		slices.Sort(names)
		fmt.Fprintln(os.Stderr, "kube: name one of", strings.Join(names, ", "))
		os.Exit(2)
	}
	os.Exit(run())
}
