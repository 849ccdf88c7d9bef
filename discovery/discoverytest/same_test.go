package discoverytest

import (
	"reflect"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"chandler.dev/discovery"
)

// If same ignored a field, the families' tests would miss changes of the field. So two devices must
// not be the same if they differ in any single place.
func TestSame(t *testing.T) {
	if a, b := filled(0, nil), filled(0, nil); !sameDevice(&a, &b) {
		t.Fatal("two equal devices are not the same")
	}
	var places []string
	filled(0, &places)
	if len(places) < 80 {
		t.Errorf("only %d places where devices can differ: %v", len(places), places)
	}
	for i, place := range places {
		if a, b := filled(0, nil), filled(i+1, nil); sameDevice(&a, &b) {
			t.Errorf("devices are the same that differ in %s", place)
		}
	}
}

// filled returns a device with all fields set. The place number other, counted from 1, has a
// different value. The names of all places are stored in places.
func filled(other int, places *[]string) discovery.Device {
	var d discovery.Device
	f := &filler{other: other}
	f.fill(reflect.ValueOf(&d).Elem(), "device")
	if places != nil {
		*places = f.places
	}
	return d
}

type filler struct {
	places []string
	other  int
}

// number returns the number for a place, a different one at the place other.
func (f *filler) number(place string) int64 {
	f.places = append(f.places, place)
	if len(f.places) == f.other {
		return 2
	}
	return 1
}

func (f *filler) fill(v reflect.Value, place string) {
	switch at := v.Addr().Interface().(type) {
	case *resource.Quantity:
		*at = *resource.NewQuantity(f.number(place), resource.DecimalSI)
		return
	case *metav1.Time:
		*at = metav1.Unix(f.number(place), 0)
		return
	}
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(f.number(place) == 1)
	case reflect.Int, reflect.Int64:
		v.SetInt(f.number(place))
	case reflect.Uint32:
		v.SetUint(uint64(f.number(place)))
	case reflect.String:
		v.SetString([]string{"", "one", "other"}[f.number(place)])
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		f.fill(v.Elem(), place)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		f.fill(v.Index(0), place)
	case reflect.Map:
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		f.fill(key, place+" key")
		f.fill(value, place)
		v.Set(reflect.MakeMap(v.Type()))
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			f.fill(v.Field(i), place+"."+v.Type().Field(i).Name)
		}
	default:
		panic(place + ": do not know how to fill a " + v.Kind().String())
	}
}
